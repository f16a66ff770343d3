"""Run the CLI from a checkout: `python cli.py up --gpus 4`."""

from deploy.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
