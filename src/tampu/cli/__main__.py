"""`python -m tampu.cli`: the same as `tampu`."""

from __future__ import annotations

from tampu.cli.main import main

if __name__ == "__main__":
    main()
