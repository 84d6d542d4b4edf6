"""What the scores of a network mean, and the rule of decision: softmax, sigmoid, evidential."""
