"""What the tests are made with, and the tests of that."""
