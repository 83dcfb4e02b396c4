"""Entry point for `spark-submit`: a script of two lines runs `tampu pipeline run` with the settings of the cluster.

from tampu.spark.run import main
main()
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Run `tampu pipeline run` with the arguments of this program."""
    # By name: this package must not depend on the commands, and an entry point is above both.
    command = import_module("tampu.cli.main").main
    sys.argv[1:1] = ["pipeline", "run"]
    command()
