/* placeholder while building */
int apa_nothing_here(void);
int apa_nothing_here(void) { return 0; }
