#include "run_cases.h"

int main(int argc, char** argv) { return check::run_cases(argc, argv); }
