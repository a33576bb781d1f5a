"""Measurements that can be repeated: workloads, the climb, comparisons with other engines, and their records."""
