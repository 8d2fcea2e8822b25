"""The waist of the house: nouns every room shares. Imports numpy and nothing of ours outside this folder."""
