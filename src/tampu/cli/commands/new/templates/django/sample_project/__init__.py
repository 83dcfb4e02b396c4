"""sample-project: a Django project that adds jobs, and a worker that runs them."""
