"""`python -m simulated serve MODEL [flags]`, in the place of `vllm serve MODEL [flags]`."""

import sys

from simulated.server import main

sys.exit(main(sys.argv[1:]))
