"""What a policy got and gave: written while it runs, checked afterwards."""
