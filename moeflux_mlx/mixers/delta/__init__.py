"""The gated delta rule: a matrix for each head that every token corrects, with decays for heads or for channels."""
