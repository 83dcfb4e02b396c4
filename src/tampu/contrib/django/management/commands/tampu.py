"""`manage.py tampu ...`: the command line of tampu with the settings of the project.

    python manage.py tampu worker shop.tasks:queue

Needs `"tampu.contrib.django"` in `INSTALLED_APPS`.
"""

from __future__ import annotations

import os
import sys

from django.core.management.base import BaseCommand

from tampu.base.targets import DJANGO_VARIABLE


class Command(BaseCommand):
    """Runs a command of tampu in place of this process, so that signals reach it."""

    help = "Run a command of tampu, such as: manage.py tampu worker shop.tasks:queue"

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command with its options. `manage.py` has put the settings module into the environment."""
        os.environ[DJANGO_VARIABLE] = "1"
        paths = [os.path.abspath(sys.path[0]), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the project, also if this is not its folder
        os.execv(sys.executable, [sys.executable, "-m", "tampu", *argv[2:]])  # noqa: S606 - without a shell
