"""The load test: requests at their own pace, faults by plan, and figures of what clients saw of them."""
