"""Problems from rows of data: files and data sets, how a row becomes a prompt, and in which order rows are drawn."""
