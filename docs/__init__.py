"""The pages of the site, and the code that runs them, draws their pictures and fills their tables."""
