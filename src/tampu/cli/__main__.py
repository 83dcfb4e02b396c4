"""`python -m tampu.cli`: the same as `tampu`."""

from tampu.cli.entry import main

if __name__ == "__main__":
    main()
