"""Other people's test suites, natively and under the library, compared by test id."""
