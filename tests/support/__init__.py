"""Twins, harnesses and conformance suites that tests share. No test is here."""
