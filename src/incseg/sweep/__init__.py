"""Many runs: their list, the folder that holds them, and the engines that make them. No engine is imported unasked."""
