"""Entry point of `python -m models.train`, and `train` in Python; see `models.training`."""

import sys

from models.training.train import main as main
from models.training.train import train as train

if __name__ == "__main__":
    sys.exit(main())
