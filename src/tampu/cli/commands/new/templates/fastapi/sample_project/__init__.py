"""sample-project: an API that adds jobs, and a worker that runs them."""
