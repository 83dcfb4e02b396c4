"""Entry point of `python -m tampu`, which is the same as `tampu`."""

from tampu.cli.__main__ import main

if __name__ == "__main__":
    main()
