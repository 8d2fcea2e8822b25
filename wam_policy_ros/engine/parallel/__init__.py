"""One policy on several GPUs: processes, what they tell each other, and the path that uses them."""
