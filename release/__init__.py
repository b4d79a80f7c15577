"""What a release is made with: pinned base images, bills of materials, the scan for vulnerabilities."""
