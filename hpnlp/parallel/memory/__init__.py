"""Memory of a training state: ZeRO, rematerialisation and host offloading."""
