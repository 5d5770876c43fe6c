"""`python -m onecard.launch`."""

import sys

from onecard.launch import main

sys.exit(main())
