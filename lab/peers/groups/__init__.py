"""Groups of problems, a file each. A problem is a model's layer, on one rank where the name says TP or EP; layers without what a peer lacks
(biases, fused activations)."""
