"""What a person looks at: curves, bars and pictures, drawn with matplotlib into PNG files."""
