"""Settings of the tests and the type checker: as in production, with a key that is known to all."""

import os

os.environ["DEBUG"] = "0"
os.environ["SECRET_KEY"] = "for tests only"

from sample_project.settings import *  # noqa: F403 - they read the environment
