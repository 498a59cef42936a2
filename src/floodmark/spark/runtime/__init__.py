"""What Spark needs of the machine: Java, Python workers, threads, retries."""
