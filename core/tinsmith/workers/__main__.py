"""`python -m tinsmith.workers`: one worker, as its environment says. Launchers start it."""

from tinsmith.workers.serving import main

main()
