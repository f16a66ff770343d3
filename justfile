# Shortcuts for contributors; each line can also be typed alone. See CONTRIBUTING.md.
bin := ".venv/bin"

# List the recipes
default:
    @just --list

# Install engines, kit and test tools into .venv
setup:
    ./scripts/install --test

# Lint and type checks
lint:
    {{bin}}/ruff check .
    {{bin}}/ruff format --check .
    PYTHONPATH=deploy/connector:deploy/router {{bin}}/lint-imports
    {{bin}}/mypy
    cd deploy/connector && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p pdkit_connector

# Unit tests, or the tests in PATHS
unit *PATHS="tests/unit":
    {{bin}}/python -m pytest -q -n 2 --dist loadfile {{PATHS}}

# What every change must pass; parts by name, or full for all the rest
test *PARTS:
    ./scripts/test {{PARTS}}

# Rewrite goldens and generated pages, then show what changed
goldens:
    UPDATE_GOLDENS=1 {{bin}}/python -m pytest -q -n 2 --dist loadfile tests/unit
    git diff --stat

# Show the documentation as a site
docs:
    {{bin}}/mkdocs serve

# Draw the pictures of the README; runs a stack for a minute
pictures:
    {{bin}}/python scripts/pictures.py diagram terminal
