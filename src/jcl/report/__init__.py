"""What a person looks at: figures as PNG files, and the page of runs, one HTML file that needs nothing else."""
