"""How good the texts are, and how fast they come: tasks, scores and the table of policy × task."""
