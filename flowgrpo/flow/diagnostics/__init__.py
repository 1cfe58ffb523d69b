"""What tells users whether a pipeline and a method fit: doctor, certificate, spectrum, and one sample explained."""
