"""Dang, Quiroz, Kohn, Tran and Villani: HMC with Energy Conserving Subsampling."""
