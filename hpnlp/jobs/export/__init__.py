"""Exports of runs, which are served without hpnlp."""
