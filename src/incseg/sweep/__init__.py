"""Many runs: the list of a sweep, its folder, and the engines that run it. Engines are imported only when used."""
