"""The deployment study: what somebody who serves this model would see, under each policy, on three workloads."""
