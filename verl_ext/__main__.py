"""`python -m verl_ext`."""

from verl_ext.cli import main

raise SystemExit(main())
