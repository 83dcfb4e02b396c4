"""What the tests of client and engine share: a proxy that cuts connections, a scripted peer, a look into a queue."""
