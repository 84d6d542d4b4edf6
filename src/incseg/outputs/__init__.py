"""The meaning of scores, and the decision rule: softmax, sigmoid, evidential."""
