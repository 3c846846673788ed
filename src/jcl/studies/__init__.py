"""The paper's figures and tables, made again."""
