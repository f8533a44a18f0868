"""`midstream verify`: whether a restored answer is the answer that would have come undisturbed."""
