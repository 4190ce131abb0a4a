"""What was measured, and how: benches, baselines, and the studies behind the book's figures."""
