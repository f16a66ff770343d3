"""Let `python -m deploy` do what the `deploy` command does."""

from deploy.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
