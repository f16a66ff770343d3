"""What `deploy bench` sends, measures and keeps."""
