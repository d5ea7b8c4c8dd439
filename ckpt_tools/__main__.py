"""`python -m ckpt_tools` is the same program as `checkpoint-inspector`."""

from ckpt_tools.cli.app import main

if __name__ == "__main__":
    main()
