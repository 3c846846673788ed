"""`python -m jcl` is the command `jcl`."""

from jcl.cli import main

if __name__ == "__main__":
    main()
