"""Operations on tables of embeddings."""
