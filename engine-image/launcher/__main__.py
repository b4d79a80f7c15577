"""Entry of the engine image: `python -m launcher`."""

from launcher.main import main

if __name__ == "__main__":
    raise SystemExit(main())
