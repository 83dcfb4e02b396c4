"""The command line, as people and programs use it: in this process, through pipes, and through a real terminal."""
