"""The command line: ``app.py`` joins the commands, one file each; heavy imports wait until a command runs."""
