"""`python -m tinsmith_workers`: one worker, as its environment says. Launchers start it."""

from tinsmith_workers.serving import main

main()
