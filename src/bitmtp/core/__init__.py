"""What texts decide: state, plans, policies, statistics; the decisions themselves are the headers."""
